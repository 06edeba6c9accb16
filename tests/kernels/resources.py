"""Resources of a compiled kernel, read with the tool that comes with Triton."""

import re
import subprocess
import tempfile
from pathlib import Path

from triton.backends import nvidia

TOOL = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


def stack_bytes(cubin: bytes) -> int:
    """Bytes of stack per thread: registers spill there, and a loop that spills is slow."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOL), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", shown))
