"""All readers, of all packages."""

from packages.bench.tests.fuzzed_readers import READERS as BENCH
from packages.core.tests.fuzz.reader import Reader
from packages.core.tests.fuzz.readers.dumps import READERS as DUMPS
from packages.core.tests.fuzz.readers.models import READERS as MODELS
from packages.core.tests.fuzz.readers.runs import READERS as RUNS
from packages.expectations.tests.fuzzed_readers import READERS as EXPECTATIONS
from packages.runners.tests.fuzzed_readers import READERS as RUNNERS
from packages.smoke.tests.fuzzed_readers import READERS as SMOKE

READERS: tuple[Reader, ...] = (*RUNS, *MODELS, *DUMPS, *EXPECTATIONS, *BENCH, *SMOKE, *RUNNERS)
