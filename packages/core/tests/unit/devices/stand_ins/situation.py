"""What happens when a stand-in is imported or first asked, by the variable STAND_INS_SITUATION.

These files are no part of the tests' own packages: processes that tests start find them on their path.
"""

import os
import time

VARIABLE = "STAND_INS_SITUATION"
SLEEP_SECONDS = 600


def act(name: str) -> None:
    """Greet on standard output as drivers do, past Python's own buffers; then hang, raise or end."""
    os.write(1, f"{name}: welcome\n".encode())
    match os.environ.get(VARIABLE, "present"):
        case "hanging":
            time.sleep(SLEEP_SECONDS)
        case "broken":
            raise OSError(f"the driver of {name} is too old")
        case "ending":
            os._exit(0)
