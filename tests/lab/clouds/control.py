"""What tests ask of a cloud in another process."""

from __future__ import annotations

from typing import Any


class CloudControl:
    """The methods of a cloud; ``hops`` are the addresses of its nodes by the next hop."""

    def __init__(self, cloud: Any, hops: dict[str, str]) -> None:
        self._cloud = cloud
        self._hops = hops

    def add_node(self, address: str) -> str:
        hop: str = self._cloud.add_node(address)
        self._hops[hop] = address
        return hop

    def set(self, name: str, value: Any) -> None:
        setattr(self._cloud, name, value)

    def key(self) -> tuple[str, str]:
        found: tuple[str, str] = self._cloud.key
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cloud, name)
