"""Broken toys: each breaks one promise of the contract, and names the scenario that must notice.

``slm_conformance.faults:NAME`` is a backend like any other: ``pytest --slm-backend slm_conformance.faults:CutUpwards``.
"""

from slm_conformance.faults.decoding import *  # noqa: F403
from slm_conformance.faults.dumps import *  # noqa: F403
from slm_conformance.faults.edits import *  # noqa: F403
from slm_conformance.faults.forks import *  # noqa: F403
from slm_conformance.faults.life import *  # noqa: F403
from slm_conformance.faults.registry import FAULTS as FAULTS
from slm_conformance.faults.registry import Fault as Fault
from slm_conformance.faults.registry import fault as fault
from slm_conformance.faults.vocabulary import *  # noqa: F403
