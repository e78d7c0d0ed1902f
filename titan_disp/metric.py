"""The name of a logged number, which belongs to the whole run or to a source of data."""


class Metric(str):
    """A name such as "documents", or "documents/web" for the source "web".

    Attributes:
        name: the name without the source.
        source: the source of data; "" means the whole run.
    """

    name: str
    source: str

    def __new__(cls, name: str, source: str = "") -> "Metric":
        metric = super().__new__(cls, f"{name}/{source}" if source else name)
        metric.name = name
        metric.source = source
        return metric
