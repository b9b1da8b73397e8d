"""Plain sentences in which needles are hidden; no invented word, no digit."""

from __future__ import annotations

from palimpsa_data.needles.draws import Draw

_WHO = (
    "the carpenter", "an old sailor", "the night nurse", "our neighbour", "the young baker", "a tired clerk",
    "the piano teacher", "the stable hand", "a visiting judge", "the tall gardener", "my cousin", "the ferry captain",
    "a retired miner", "the choir", "the new apprentice", "a street musician", "the librarian", "the whole village",
    "a careful surveyor", "the cook", "the station master", "a pair of students", "the glassblower", "the shepherd",
)  # fmt: skip
_DID = (
    "repaired", "carried", "painted", "forgot", "borrowed", "weighed", "photographed", "described", "hid", "sold",
    "polished", "counted", "wrapped", "admired", "dropped", "returned", "measured", "sketched", "washed", "lent out",
)  # fmt: skip
_WHAT = (
    "a wooden ladder", "the copper kettle", "three baskets of pears", "a bundle of letters", "the garden gate",
    "a chipped vase", "the winter coats", "an iron bell", "a sack of barley", "the spare keys", "two lanterns",
    "a map of the coast", "the broken oar", "a tin of nails", "the blue curtains", "a jar of honey", "the old ledger",
    "a roll of canvas", "the marble chessboard", "a crate of oranges", "the church candles", "a torn umbrella",
)  # fmt: skip
_WHEN = (
    "before the rain", "late in the evening", "on the first warm day", "during the harvest", "after the long meeting",
    "while the kettle sang", "shortly after dawn", "at the end of the month", "between two storms", "on market day",
    "when the bells had stopped", "in the week of the fair", "just before supper", "throughout the cold spring",
)  # fmt: skip
_WHERE = (
    "behind the mill", "at the harbour", "under the chestnut trees", "in the back room", "beside the canal",
    "near the railway bridge", "on the upper floor", "along the gravel path", "in the quiet chapel", "by the well",
    "next to the bakery", "at the edge of the field", "on the hill above town", "inside the boathouse",
)  # fmt: skip
_SHAPES = (
    "{when}, {who} {did} {what} {where}.",
    "{who} {did} {what} {when}.",
    "{who} {did} {what} {where}, and nobody minded.",
    "{where}, {who} once {did} {what}.",
    "It was {when} that {who} {did} {what}.",
    "Few remember how {who} {did} {what} {where}.",
    "{who} {did} {what}, then waited {where}.",
)


def sentence(draw: Draw) -> str:
    made = draw.choice(_SHAPES).format(
        who=draw.choice(_WHO),
        did=draw.choice(_DID),
        what=draw.choice(_WHAT),
        when=draw.choice(_WHEN),
        where=draw.choice(_WHERE),
    )
    return made[0].upper() + made[1:]
