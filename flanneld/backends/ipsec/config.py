"""Options of the ipsec backend, as upstream names them (pure)."""

from __future__ import annotations

from hashlib import sha256

from msgspec import Struct

from flanneld.compat.json import GoJsonError
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Secret

#: Minimum bytes of a PSK, as in upstream.
SHORTEST_PSK = 96
_ESP_PROPOSAL = "aes128gcm16-sha256-prfsha256-ecp256"


class IpsecConfig(Struct, frozen=True, gc=False):
    """The Backend object of the network config."""

    psk: Secret
    udp_encap: bool = False
    esp_proposal: str = _ESP_PROPOSAL

    @property
    def digest(self) -> str:
        """Return a digest of all options: SAs negotiated with others must not go on."""
        text = f"{self.udp_encap} {self.esp_proposal} ".encode()
        return sha256(text + self.psk.value).hexdigest()


def read_config(config: Config) -> IpsecConfig:
    """Read the options. Raises ``Fatal`` for an unusable value; the message does not contain the PSK."""
    fields = config.backend
    try:
        udp_encap = fields.boolean("UDPEncap", False)
        proposal, psk = fields.string("ESPProposal", _ESP_PROPOSAL), fields.string("PSK", "")
    except GoJsonError as error:
        raise Fatal(f"error decoding IPSEC backend config: {error}", "correct Backend in the store") from None
    key = psk.encode("utf-8", "replace")
    if len(key) < SHORTEST_PSK:
        raise Fatal(
            f"config error, password should be at least {SHORTEST_PSK} characters long",
            "set Backend.PSK, as from: openssl rand -hex 48",
        )
    if not proposal.isascii() or not proposal.isprintable():
        raise Fatal("Backend.ESPProposal is no proposal", "write it as in strongSwan's documentation")
    return IpsecConfig(Secret(key), udp_encap, proposal)
