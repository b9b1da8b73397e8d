"""Loops that Triton 3.6 compiles wrongly, found in what its front end makes of a kernel.

Where a value that a loop carries is used by nested loops' bounds alone, that version takes it for unused and puts the
value from before the loop in its place (triton-lang/triton pull request 9036).
"""

import re

LOOP = re.compile(r"scf\.for (?:%\w+) = (?P<bounds>.*?)(?: iter_args\((?P<carried>.*?)\))? ?(?:->|:)")


def used_as_bounds_alone(ttir: str) -> list[str]:
    """Names of the values in a kernel's TTIR that a loop carries and only the bounds of loops in it use."""
    lines = [line.split(" loc(")[0].rstrip() for line in ttir.splitlines()]
    found = []
    for place, line in enumerate(lines):
        loop = LOOP.search(line)
        if loop is None or loop["carried"] is None:
            continue
        indent = line[: len(line) - len(line.lstrip())]
        end = next(i for i in range(place + 1, len(lines)) if lines[i].startswith(indent + "}"))
        body = lines[place + 1 : end]
        carried = re.findall(r"(%[\w#]+) = ", loop["carried"])
        found += [value for value in carried if _uses(value, body) == {"bound"}]
    return found


def _uses(value: str, body: list[str]) -> set[str]:
    """ "bound" for use in a loop's bounds, "other" for any other but handing it on; through integer arithmetic."""
    uses: set[str] = set()
    waiting, seen = [value], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        pattern = re.compile(re.escape(name) + r"(?!\w)")
        for line in body:
            loop = LOOP.search(line)
            if loop is not None:
                uses |= {"bound"} if pattern.search(loop["bounds"]) else set()
                uses |= {"other"} if pattern.search(loop["carried"] or "") else set()
                continue
            result = re.match(r"\s*(%\w+) = (arith\.\w+)?(.*)", line)
            if not pattern.search(result[3] if result else line) or "scf.yield" in line:
                continue
            if result and result[2]:
                waiting += [result[1]] if result[1] not in seen else []
            else:
                uses.add("other")
    return uses
