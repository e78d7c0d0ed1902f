"""The name of a number that is logged, of the whole run or of one source of data."""


class Metric(str):
    """A name such as "documents", or "documents/web" for the source "web".

    Attributes:
        name: the name without the source.
        source: the source of data; "" stands for the whole run.
    """

    name: str
    source: str

    def __new__(cls, name: str, source: str = "") -> "Metric":
        metric = super().__new__(cls, f"{name}/{source}" if source else name)
        metric.name = name
        metric.source = source
        return metric
