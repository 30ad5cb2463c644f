"""The subject of a run: the backend, its devices, and the models that it runs."""

from __future__ import annotations

from dataclasses import dataclass

from slm_conformance.suite.workshop import Workshop


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """The declarations of a backend for a model.

    Attributes:
        name: the adopter's name for it.
        problem: why the other attributes are unknown, or "".
        backend: the backend's name.
        device: device of the loaded model.
        edit_level: edit level of its contexts.
        capabilities: capabilities of its contexts, sorted.
    """

    name: str
    problem: str = ""
    backend: str = ""
    device: str = ""
    edit_level: str = ""
    capabilities: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        declared = ", ".join(self.capabilities) or "nothing"
        return f"{self.name}: {self.backend} on {self.device}, edit level {self.edit_level}, declares {declared}"


@dataclass(frozen=True, slots=True)
class Subject:
    """The backend under test.

    Attributes:
        backend: its name.
        version: version of the backend.
        devices: the available devices.
        models: the models under test.
        problem: why it cannot run at all, or "".
    """

    backend: str
    version: str = ""
    devices: tuple[str, ...] = ()
    models: tuple[ModelUnderTest, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        return self.problem or f"{self.backend} {self.version}, devices {', '.join(self.devices) or 'none'}"


def describe(workshop: Workshop) -> Subject:
    """Describe an installed backend; loads its models."""
    status = workshop.backend.status()
    devices = tuple(device.name for device in status.devices if device.available)
    models = tuple(_describe_model(workshop, name) for name in workshop.fixtures.models)
    return Subject(status.name, status.version, devices, models)


def _describe_model(workshop: Workshop, name: str) -> ModelUnderTest:
    refusal = workshop.refusal(name)
    if refusal is not None:
        return ModelUnderTest(name, f"not supported: {refusal}")
    try:
        info = workshop.model(name).info
        level, capabilities = workshop.declared(name)
    except Exception as error:  # all errors are shown here, and again by the scenarios
        return ModelUnderTest(name, f"cannot be loaded: {error}")
    return ModelUnderTest(name, "", info.backend, info.device, level.name, tuple(sorted(capabilities)))
