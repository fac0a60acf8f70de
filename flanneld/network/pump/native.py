from flanneld.network.pump.python import PythonPlane


def available() -> str | None:
    return "not built"


class NativePlane(PythonPlane):
    name = "native"
