"""What a run is about: the backend, its devices, and what it makes of each model."""

from __future__ import annotations

from dataclasses import dataclass

from slm_conformance.suite.bench import Workshop


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """What a backend says of a model.

    Attributes:
        name: as the adopter names it.
        problem: why nothing of what follows is known, or "".
        backend: the backend's own name for itself.
        device: what the model was loaded on.
        edit_level: what its contexts declare.
        capabilities: what its contexts declare, sorted.
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
    """What is under test.

    Attributes:
        backend: its name.
        version: of the backend.
        devices: those that are available.
        models: what it runs on.
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
    """Ask a backend that is installed; loads its models."""
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
    except Exception as error:  # whatever a backend raises is shown here, and again by the scenarios
        return ModelUnderTest(name, f"cannot be loaded: {error}")
    return ModelUnderTest(name, "", info.backend, info.device, level.name, tuple(sorted(capabilities)))
