"""What holds for the tests of all packages."""

import os

# Read by OpenMP when torch is imported, and inherited by processes of the tests. Where tests share processors,
# threads that spin for one another take minutes for seconds of work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
