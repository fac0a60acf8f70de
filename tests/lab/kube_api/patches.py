"""Patches: RFC 7396 merge patch, and Kubernetes' strategic merge patch with its directives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]

#: The lists of a Node that are merged, by path, with what identifies a member; those of plain values have no
#: such thing. All other lists are replaced (struct tags in k8s.io/api/core/v1).
MERGED = {
    ("metadata", "ownerReferences"): "uid",
    ("metadata", "finalizers"): "",
    ("spec", "podCIDRs"): "",
    ("status", "conditions"): "type",
    ("status", "addresses"): "type",
}
_DELETE_FROM = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"


def merge(target: Any, patch: Any) -> Any:
    """Apply a merge patch: null removes, objects are merged, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def strategic_merge(
    target: Mapping[str, Any], patch: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Object:
    """Apply a strategic merge patch to the object at ``path``; a nameless member raises ``ValueError``."""
    directive = patch.get("$patch")
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    if directive == "delete":
        return {}
    merged = dict(target)
    if (kept := patch.get("$retainKeys")) is not None:
        merged = {key: value for key, value in merged.items() if key in kept}
    for key, value in patch.items():
        if key.startswith(_DELETE_FROM):
            name = key.removeprefix(_DELETE_FROM)
            merged[name] = [member for member in merged.get(name, []) if member not in value]
        elif key.startswith("$"):
            continue
        elif value is None:
            merged.pop(key, None)
        else:
            order = patch.get(_ORDER + key)
            merged[key] = _strategic_value(merged.get(key), value, (*path, key), order)
    return merged


def _strategic_value(old: Any, new: Any, path: tuple[str, ...], order: Sequence[Any] | None) -> Any:
    if isinstance(new, dict):
        return strategic_merge(old if isinstance(old, dict) else {}, new, path)
    if not isinstance(new, list) or path not in MERGED:
        return new
    old = old if isinstance(old, list) else []
    identity = MERGED[path]
    if not identity:
        return [*old, *(member for member in dict.fromkeys(new) if member not in old)]
    return _merge_members(old, new, identity, order)


def _merge_members(
    old: list[Object], new: list[Object], identity: str, order: Sequence[Object] | None
) -> list[Object]:
    if any(member.get("$patch") == "replace" for member in new):
        return [member for member in new if "$patch" not in member]
    for member in new:
        if identity not in member:
            raise ValueError(f"map: {member} does not contain declared merge key: {identity}")
    gone = {member[identity] for member in new if member.get("$patch") == "delete"}
    before = {member[identity]: member for member in old if member[identity] not in gone}
    patched = {
        member[identity]: strategic_merge(before.get(member[identity], {}), member)
        for member in new
        if member[identity] not in gone
    }
    wanted = list(patched) if order is None else [member[identity] for member in order]
    first = [name for name in wanted if name in patched or name in before]
    rest = [name for name in before if name not in first and name not in patched]
    return [patched.get(name) or before[name] for name in _interleave(first, rest, list(before))]


def _interleave(first: list[str], rest: list[str], before: list[str]) -> list[str]:
    """Bring what the patch names and what it does not into one order.

    Two that were both there keep their order; a new one comes before all that are left of the others.
    """
    first, rest, result = list(first), list(rest), []
    while first and rest:
        later = first[0] in before and before.index(first[0]) > before.index(rest[0])
        result.append((rest if later else first).pop(0))
    return [*result, *first, *rest]
