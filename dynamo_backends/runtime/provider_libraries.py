"""Execution providers that are not built into ONNX Runtime, but come as libraries: plugins.

A package whose name starts with ``onnxruntime-ep-`` has such a library, and the names of its providers. The option
``library`` of a provider gives the path of another one. ONNX Runtime loads a library when it is registered, until the
process ends, and then lists the devices on which its providers can run. A session gets a provider by a device::

    options = onnxruntime.SessionOptions()
    if not add_providers(options, [("OpenVINOExecutionProvider", {"device": "GPU"})]):
        ...  # all are built in: the session takes them by name

Each ``repro.py`` contains this module, which therefore imports only ONNX Runtime.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import onnxruntime

PREFIX = "onnxruntime-ep-"
"""What the names of packages with providers start with."""

OWN_OPTIONS = {
    "device": "the kind of device, such as GPU, or a value of its metadata",
    "library": "the path of the provider's library, instead of an installed package",
}
"""Options of a provider that are not ONNX Runtime's."""


class ProviderError(ValueError):
    """A provider cannot be used here; the message says what there is."""


@dataclasses.dataclass(frozen=True)
class Plugin:
    """An installed package with providers.

    Attributes:
        package, version: of the distribution.
        names: of the providers.
        library: the path.
        error: why the package cannot be used; then there are no names and no library.
    """

    package: str
    version: str
    names: tuple[str, ...] = ()
    library: str = ""
    error: str = ""


@functools.cache
def installed_plugins() -> tuple[Plugin, ...]:
    """The installed packages with providers."""
    found: dict[str, Plugin] = {}
    for item in metadata.distributions():
        package = (item.name or "").lower().replace("_", "-")
        if package.startswith(PREFIX) and package not in found:
            found[package] = _plugin(package, item.version)
    return tuple(found[package] for package in sorted(found))


def _plugin(package: str, version: str) -> Plugin:
    try:
        module = importlib.import_module(package.replace("-", "_"))
        return Plugin(package, version, tuple(module.get_ep_names()), str(module.get_library_path()))
    except Exception as error:  # whatever code of others raises
        return Plugin(package, version, error=f"{type(error).__name__}: {error}")


def plugin_of(name: str) -> Plugin | None:
    """The installed package that has a provider; its names may have a suffix, as ``OpenVINOExecutionProvider.AUTO``."""
    for plugin in installed_plugins():
        if any(name == known or name.startswith(f"{known}.") for known in plugin.names):
            return plugin
    return None


_registered: set[str] = set()
_lock = threading.Lock()
_used: set[str] = set()
"""Plugins' providers that had a session in this process."""
_used_in_parent: set[str] = set()
"""Those that had one in the process from which this one was forked."""


def _renew() -> None:
    global _lock
    _lock = threading.Lock()
    _used_in_parent.update(_used)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew)


def register(library: str) -> None:
    """Loads a library of providers, once in a process.

    Raises:
        ProviderError: ONNX Runtime cannot load it.
    """
    path = os.path.realpath(library)
    with _lock:
        if path in _registered:
            return
        try:
            onnxruntime.register_execution_provider_library(f"dynamo_backends {path}", path)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise ProviderError(f"the library of execution providers {path} cannot be loaded: {error}") from error
        _registered.add(path)


def devices_of(name: str, library: str = "") -> list[Any]:
    """The devices of a plugin's provider on this machine, those for sessions that run first.

    Args:
        name: of the provider. The library of an installed package is registered.
        library: the path of another library.

    Returns:
        ONNX Runtime's ``OrtEpDevice``; an empty list if there is no plugin, or it finds no device.

    Raises:
        ProviderError: the library cannot be loaded, or is not known.
    """
    plugin = plugin_of(name)
    library = library or (plugin.library if plugin is not None else "")
    devices = _listed(name)
    if library and library not in map(_library_of, devices):
        register(library)
        devices = _listed(name)
    mine = [item for item in devices if _is_same(library, _library_of(item))]
    if devices and not mine:
        path = _library_of(devices[0])
        raise ProviderError(
            f"the library of {name!r} was registered by other code. Give the option {{'library': {path!r}}}, "
            "with which subprocesses find it"
        )
    return sorted(mine, key=lambda item: (is_virtual(item), item.device.type.name != "CPU"))


def _is_same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def is_built_in(name: str) -> bool:
    """Whether a provider is a part of the installed ONNX Runtime."""
    return name in onnxruntime.get_available_providers() and not _listed(name)


def _listed(name: str) -> list[Any]:
    """The devices of a provider that came with a library."""
    return [item for item in onnxruntime.get_ep_devices() if item.ep_name == name and _library_of(item)]


def _library_of(device: Any) -> str:
    return str(device.ep_metadata.get("library_path", ""))


def is_virtual(device: Any) -> bool:
    """Whether a device is not there: a provider can compile for it, and not run."""
    return bool(device.device.metadata.get("is_virtual") == "1")


def device_of(name: str, given: Mapping[str, str]) -> Any | None:
    """The device on which sessions run a provider; ``None`` for one that is built in, which they take by name.

    Args:
        name: of the provider.
        given: its options.

    Raises:
        ProviderError: there is no such provider or device, or its library cannot be loaded.
    """
    library, wanted = given.get("library", ""), given.get("device")
    if not library and is_built_in(name):
        if wanted is None:
            return None
        devices = [item for item in onnxruntime.get_ep_devices() if item.ep_name == name]
    else:
        devices = devices_of(name, library)
        if not devices and not version_text(name, given):
            raise ProviderError(f"execution provider {name!r} is neither built into ONNX Runtime nor installed")
        if not devices:
            hardware = sorted({device_text(item) for item in onnxruntime.get_ep_devices() if not is_virtual(item)})
            raise ProviderError(
                f"execution provider {name!r} of {version_text(name, given)} finds no device that it supports on this "
                f"machine. ONNX Runtime lists: {', '.join(hardware)}"
            )
    if name in _used_in_parent:
        raise ProviderError(
            f"execution provider {name!r} ran in the process from which this one was forked, and may wait forever for "
            "threads of that process; start processes with the method 'spawn'"
        )
    for item in devices:
        if wanted is None or wanted.lower() in _labels(item):
            return item
    raise ProviderError(
        f"execution provider {name!r} has no device {wanted!r}; it has: {', '.join(map(device_text, devices))}"
    )


def version_text(name: str, given: Mapping[str, str]) -> str:
    """The package of a plugin with its version, or the path of its library; empty if the provider is built in."""
    plugin = None if is_built_in(name) else plugin_of(name)
    return given.get("library", "") or (f"{plugin.package} {plugin.version}" if plugin is not None else "")


def _labels(device: Any) -> list[str]:
    values = [*device.ep_metadata.values(), *device.device.metadata.values()]
    return [value.lower() for value in (device.device.type.name, device.device.vendor, *values)]


def device_text(device: Any) -> str:
    """A device for people: ``CPU (AMD EPYC)``."""
    kind, said = device.device.type.name, device.ep_metadata
    which = said.get("ov_device", kind)
    text = f"{which} ({said.get('FULL_DEVICE_NAME') or device.device.vendor or 'unknown'})"
    return f"{text}, virtual: compiles, and does not run" if is_virtual(device) else text


def device_name(name: str, given: Mapping[str, str]) -> str:
    """The device on which sessions run a provider, for people; empty if it is built in, or has none."""
    try:
        device = device_of(name, given)
    except ProviderError:
        return ""
    return "" if device is None else device_text(device)


def add_providers(options: Any, providers: Sequence[tuple[str, Mapping[str, str]]]) -> bool:
    """Adds providers to the ``SessionOptions`` of a session, if one of them is used by a device.

    Args:
        options: of the session.
        providers: names and options, in order of preference.

    Returns:
        Whether they were added. If not, the session must be given them by name.

    Raises:
        ProviderError: see ``device_of``.
    """
    devices = [device_of(name, given) for name, given in providers]
    if not any(devices):
        return False
    for (name, given), device in zip(providers, devices):  # noqa: B905, as old as 3.8
        others = {key: str(value) for key, value in given.items() if key not in OWN_OPTIONS}
        if device is None:
            options.add_provider(name, others)
        else:
            options.add_provider_for_devices([device], others)
            if _library_of(device):
                _used.add(name)
    return True
