"""Driver for nftables: rules in a table of our own, through libnftables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from flanneld.errors import install_command
from flanneld.model import Family
from flanneld.network.firewall import nft_json
from flanneld.network.firewall.driver import Rejected, Unavailable
from flanneld.network.firewall.edits import Edit
from flanneld.network.firewall.nft_json import JsonCommand, NftablesListing
from flanneld.network.firewall.rules import NATIVE_TABLE, Rules

_LIBRARY = "libnftables.so.1"
#: Table in which rules are tried.
_TRIAL = "flannel-trial"


class Nftables:
    """Driver for the table ``ip flannel-ipv4`` or ``ip6 flannel-ipv6``; for one thread.

    Raises ``Unavailable``.
    """

    name = "nftables"

    def __init__(self, family: Family) -> None:
        self._family = family
        self._library = _load()
        self._listing = NftablesListing({}, {}, others=False)

    def read(self) -> Rules:
        self._listing = self._list()
        return self._listing.rules

    def apply(self, edits: Sequence[Edit]) -> None:
        """Apply edits planned from the last ``read`` in one transaction."""
        self._run(self._orders(edits))

    def check(self, rules: Rules) -> None:
        """Try rules in a table that is gone in the same transaction. Raises ``Rejected``."""
        place = {**nft_json.table(self._family), "name": _TRIAL}
        tried = (
            Edit((_TRIAL, name), flush=True, append=inside) for (_, name), inside in rules.items() if inside
        )
        made = (order for edit in tried for order in nft_json.chain_commands(self._family, edit, {}))
        self._run([{"add": {"table": place}}, *made, {"delete": {"table": place}}])

    def script(self, edits: Sequence[Edit]) -> Iterator[str]:
        yield "nft -j -f - <<'END'"
        yield json.dumps({"nftables": self._orders(edits)})
        yield "END"

    def _orders(self, edits: Sequence[Edit]) -> list[JsonCommand]:
        return nft_json.commands(self._family, edits, self._listing)

    def _list(self) -> NftablesListing:
        table = nft_json.table(self._family)
        tables = self._run([{"list": {"tables": {"family": table["family"]}}}])
        names = [item["table"]["name"] for item in tables["nftables"] if "table" in item]
        if NATIVE_TABLE[self._family] not in names:
            return NftablesListing({}, {}, others=False)
        answer = self._run([{"list": {"table": table}}])
        try:
            return nft_json.read_listing(self._family, answer)
        except ValueError as error:
            raise Rejected(f"cannot read our rules in nftables: {error}", "see `nft list ruleset`") from error

    def _run(self, commands: list[JsonCommand]) -> Any:
        status, answer, error = self._library.json_cmd({"nftables": commands})
        if status:
            said = " ".join(str(error).split())
            raise Rejected(f"nftables refuses our rules: {said}", "see `nft list ruleset`")
        return answer


def _load() -> Any:
    """Import the Python binding on demand: it is optional, and so is the library that it loads."""
    import ctypes

    try:
        ctypes.CDLL(_LIBRARY)  # without the library, the binding would fail with output on stderr
    except OSError as error:
        raise Unavailable(
            f"cannot load {_LIBRARY}: {error}", "install the Debian package libnftables1"
        ) from error
    try:
        import nftables
    except ImportError as error:
        raise Unavailable(
            "the Python module nftables is not installed",
            install_command("nftables", "python3-nftables"),
        ) from error
    library = nftables.Nftables(_LIBRARY)
    library.set_json_output(True)
    library.set_handle_output(True)
    library.set_stateless_output(True)
    return library
