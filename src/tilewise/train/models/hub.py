"""Where weights and tokenizers come from: a folder here, or the hub, which is asked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tilewise.errors import ConfigError

ANSWER_S = 10.0  # how long the hub may take to answer


class Place(NamedTuple):
    """What to give to `from_pretrained`: a name or path, and whether to stay away from the network.

    Args:
        name: a path or a hub id.
        extra: keywords that go with it.
        doubt: what is to be said if it fails, in front of the reason.
    """

    name: str
    extra: dict[str, Any]
    doubt: str


def find_place(name: str, wanted: str) -> Place:
    """A folder, or a hub id that the hub knows; without a network what was downloaded before is taken.

    `transformers` asks five times, with pauses and a warning each, for a name that does not exist. One question
    before it tells as much.

    Args:
        name: as set.
        wanted: what the folder would hold, for the message.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Place(str(folder), {}, "")
    if name.count("/") > 1 or name.startswith(("/", ".", "~")):  # no hub id
        raise ConfigError(f"there is no folder {name!r}, wanted one with {wanted}")
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    doubt = "there is no such folder here, and as a hub id: "
    try:
        model_info(name, timeout=ANSWER_S)
    except GatedRepoError:
        return Place(name, {}, doubt)  # it exists; whether it is open to us is seen when it is loaded
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"there is no folder {name!r} here, wanted one with {wanted}; and the hub has no such model: {reason}"
        ) from error
    except HfHubHTTPError:  # it does answer; a mirror may not know this question
        return Place(name, {}, doubt)
    except Exception:  # no network, a proxy, an outage: the types of whatever library sends the question
        return Place(name, {"local_files_only": True}, f"{doubt}the hub cannot be reached, and of earlier downloads: ")
    return Place(name, {}, doubt)
