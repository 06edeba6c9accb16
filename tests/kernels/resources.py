"""Resources of a compiled kernel, read with the tool that comes with Triton."""

import re
import subprocess
import tempfile
from pathlib import Path

from triton.backends import nvidia

TOOL = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack per thread. Registers spill to the stack, and a loop that spills is slow."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOL), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {"registers": "REG", "stack": "STACK"}
    return {name: max(map(int, re.findall(rf"\b{word}:(\d+)", shown))) for name, word in names.items()}
