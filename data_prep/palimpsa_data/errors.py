"""The one error of this package that is the user's to mend."""


class DataError(ValueError):
    """Input, shards or disk are not what the job needs; the message names the file and what to do."""
