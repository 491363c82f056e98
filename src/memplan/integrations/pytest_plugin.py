"""`@pytest.mark.limit_gpu_memory("20 GiB", gpu="rtx4090")` and the fixture `gpu_memory`.

A marked test runs on memplan's fake CUDA, and fails where the high bound of its peak is above the
limit. The fixture does the same for a block of a test. Nothing is imported or changed in a session
without either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memplan.api import Capture
    from memplan.integrations.memory_test import Baseline, Entry

GpuMemory = Callable[..., AbstractContextManager["Capture"]]
_MARKER = "limit_gpu_memory"
_FIXTURE = "gpu_memory"
_ONE_STEP = "one optimizer step was captured, and the second may need more: run three"
_TESTS = pytest.StashKey["_Tests"]()


class _Tests:
    """The committed estimates of a session, and the new ones."""

    def __init__(self, config: pytest.Config) -> None:
        from memplan.integrations.memory_test import read_baseline

        self.path = Path(config.rootpath, config.getini("memplan_baseline"))
        self.update = bool(config.getoption("memplan_update"))
        self.found: dict[str, Entry] = {}
        self._read: Callable[[Path], Baseline] = read_baseline
        self._before: Baseline | None = None

    @property
    def before(self) -> Baseline:
        if self._before is None:
            self._before = self._read(self.path)
        return self._before

    @contextmanager
    def limited(self, name: str, limit: str | int | None, gpu: str | None) -> Iterator[Capture]:
        """A block under capture, held to the limit when it has ended by itself."""
        __tracebackhide__ = True
        import memplan
        from memplan.integrations.memory_test import complaint, entry_of, limit_bytes
        from memplan.types.errors import MemplanError

        said = ""
        try:
            most = limit_bytes(limit, gpu)
            before = self.before.tests.get(name)
            with memplan.capture(gpu=gpu) as captured:
                yield captured
            estimate = captured.estimate()
            self.found[name] = entry_of(estimate)
            said = complaint(estimate, most, before, self.path.name)
        except MemplanError as error:
            said = f"{_MARKER}: {error}"
        if said:
            pytest.fail(said, pytrace=False)
        if captured.trace().meta.optimizer_steps == 1:
            warnings.warn(_ONE_STEP, stacklevel=1)

    def write(self) -> None:
        from memplan.integrations.memory_test import write_baseline

        if self.update and self.found:
            write_baseline(self.path, {**self.before.tests, **self.found})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memplan", "GPU memory of tests")
    group.addoption(
        "--memplan-update",
        action="store_true",
        help="write the estimates of the tests that run into the baseline file",
    )
    parser.addini(
        "memplan_baseline",
        "committed estimates that a failure is compared with",
        default="memplan-baseline.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(limit, gpu=None): run the test on fake CUDA, and fail where the GPU memory it "
        "needs may be above the limit, such as '20 GiB'; without one, above the card's",
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test, whose backward pass might be a real one."""
    used = (_uses(item) for item in session.items)
    if any(used) and not session.config.option.collectonly:
        import memplan

        memplan.prepare()
        session.config.stash[_TESTS] = _Tests(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker(_MARKER)
    if marker is None:
        return (yield)
    with item.config.stash[_TESTS].limited(item.nodeid, *_arguments(marker)):
        return (yield)


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> GpuMemory:
    """`with gpu_memory("20 GiB", gpu="rtx4090") as captured:` runs the block on fake CUDA,
    and fails where the GPU memory it needs may be above the limit. `captured.estimate()` has the
    figures."""
    tests = request.config.stash[_TESTS]
    used: list[str] = []

    def limited(
        limit: str | int | None = None, *, gpu: str | None = None
    ) -> AbstractContextManager[Capture]:
        used.append(request.node.nodeid)
        number = f" #{len(used)}" if len(used) > 1 else ""
        return tests.limited(request.node.nodeid + number, limit, gpu)

    return limited


def pytest_sessionfinish(session: pytest.Session) -> None:
    tests = session.config.stash.get(_TESTS, None)
    worker: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if tests is None:
        return
    if worker is None:
        tests.write()
    else:  # of pytest-xdist: the controller writes
        import msgspec

        worker[_MARKER] = msgspec.to_builtins(tests.found)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended; what it found is kept until the session's end."""
    found = getattr(node, "workeroutput", {}).get(_MARKER)
    if found:
        import msgspec

        from memplan.integrations.memory_test import Entry

        tests = node.config.stash.setdefault(_TESTS, _Tests(node.config))
        tests.found |= msgspec.convert(found, dict[str, Entry])


def _uses(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return _FIXTURE in names or item.get_closest_marker(_MARKER) is not None


def _arguments(marker: pytest.Mark) -> tuple[str | int | None, str | None]:
    """Limit and card."""
    unknown = set(marker.kwargs) - {"limit", "gpu"}
    if unknown or len(marker.args) > 1 or (marker.args and "limit" in marker.kwargs):
        pytest.fail(f"{_MARKER} takes a limit and gpu=, not {marker.args} {marker.kwargs}", False)
    limit = marker.args[0] if marker.args else marker.kwargs.get("limit")
    return limit, marker.kwargs.get("gpu")
