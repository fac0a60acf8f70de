"""Clouds of the lab by the type of the backend, each loaded when asked for: it needs packages of its own."""

from __future__ import annotations

from typing import Any

#: The real addresses of the metadata services. Tencent's is a name, which resolves to this address.
METADATA = {
    "aws-vpc": "169.254.169.254",
    "gce": "169.254.169.254",
    "ali-vpc": "100.100.100.200",
    "tencent-vpc": "169.254.0.23",
}


def make_cloud(kind: str) -> Any:
    """Return the server of a cloud."""
    if kind == "aws-vpc":
        from tests.lab.clouds.aws import AwsService

        return AwsService()
    if kind == "gce":
        from tests.lab.clouds.gce import GceService

        return GceService()
    if kind == "ali-vpc":
        from tests.lab.clouds.ali import AliService

        return AliService()
    from tests.lab.clouds.tencent import TencentService

    return TencentService()
