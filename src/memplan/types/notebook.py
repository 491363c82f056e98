"""How an answer becomes a notebook's output."""

from __future__ import annotations


class InNotebooks:
    """A base without fields: what it is shown as is the business of `memplan.report`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from memplan.report.notebook import html_of

        return html_of(self)
