"""Find weights and tokenizers: in a local folder, or on the hub with a single request."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from tilewise.errors import ConfigError

ANSWER_S = 10.0  # timeout of the request to the hub


class Place(NamedTuple):
    """Arguments for `from_pretrained`: a name or path, and whether the network may be used.

    Args:
        name: a path or a hub id.
        extra: further keywords.
        caveat: text in front of the reason if loading fails.
    """

    name: str
    extra: dict[str, Any]
    caveat: str


def find_place(name: str, wanted: str) -> Place:
    """Return a local folder, or a hub id that exists. Without a network, earlier downloads are used.

    `transformers` repeats its request five times, with pauses and warnings, for a name that does not exist. A single
    request before it avoids this.

    Args:
        name: the value of the setting.
        wanted: what the folder must contain, for the message.
    """
    folder = os.path.expanduser(name)  # a user who does not exist stays as it is
    if os.path.isdir(folder):
        return Place(folder, {}, "")
    if name.count("/") > 1 or name.startswith(("/", ".", "~")):  # no hub id
        raise ConfigError(f"there is no folder {name!r}; a folder with {wanted} is needed")
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    caveat = "it is not a local folder. As a hub id: "
    try:
        model_info(name, timeout=ANSWER_S)
    except GatedRepoError:
        return Place(name, {}, caveat)  # it exists; loading it shows whether access is allowed
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"there is no local folder {name!r} with {wanted}, and the hub has no such model: {reason}"
        ) from error
    except HfHubHTTPError:  # the hub answers, but a mirror may not support this request
        return Place(name, {}, caveat)
    except Exception:  # no network, a proxy, an outage: the HTTP library has error types of its own
        return Place(name, {"local_files_only": True}, f"{caveat}the hub cannot be reached. In earlier downloads: ")
    return Place(name, {}, caveat)
