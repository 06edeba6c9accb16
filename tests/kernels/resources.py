"""What a compiled kernel takes, by the tool that comes with Triton."""

import re
import subprocess
import tempfile
from pathlib import Path

from triton.backends import nvidia

TOOL = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


def stack_bytes(cubin: bytes) -> int:
    """Memory of each thread for what its registers do not hold: a loop that spills much of it is slow."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOL), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", shown))
