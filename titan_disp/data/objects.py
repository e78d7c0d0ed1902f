"""This module asks object stores through fsspec: S3 and its likes, and Google Cloud
Storage. Of the hub, it only lists files.
"""

import os
import re
from functools import cache
from typing import Any

from titan_disp.data.formats import NAMES, is_readable
from titan_disp.data.hub import LISTING_SECONDS, HubName, commit_of
from titan_disp.data.local_files import (
    check_kinds,
    is_pattern,
    readable_formats,
    select,
)
from titan_disp.data.retry import may_recover, retried
from titan_disp.errors import ConfigError

# time-out of a request for an object, with the tries that the store's own library makes
REQUEST_SECONDS = 30.0
FIND_SECONDS = 600.0  # time-out of a whole listing: a request for each 1,000 objects
ACCESS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws (AWS_ENDPOINT_URL if it is not Amazon's, FSSPEC_S3_ANON=1 "
    "if it is public)",
    "gs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS (FSSPEC_GS_TOKEN=anon if it is public)",
    "hf": "a token (hf auth login, or HF_TOKEN)",
}


def is_url(path: str) -> bool:
    return re.match(r"\w+://", str(path)) is not None


def is_folder(path: str) -> bool:
    """Return whether a path is a local folder, or a URL that is read as one."""
    return os.path.isdir(path) or (
        is_url(path) and not is_pattern(path) and not is_readable(path)
    )


@cache
def _store(scheme: str) -> Any:
    import fsspec

    try:  # without a cache of the listing, changes are seen
        return fsspec.filesystem(
            scheme, skip_instance_cache=True, use_listings_cache=False
        )
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs a package ({error}): pip install {scheme}fs"
        ) from error


# a prefetch worker has no thread of its parent
os.register_at_fork(after_in_child=_store.cache_clear)


def ask(url: str, method: str, seconds: float | None = None, **options: Any) -> Any:
    """Call a method of the store, for ``REQUEST_SECONDS`` at most."""
    store = _store(url.split("://")[0])
    # the hub's requests have their own
    limit = {"timeout": seconds or REQUEST_SECONDS} if store.async_impl else {}
    return getattr(store, method)(url, **limit, **options)


def etag_of(info: dict[str, Any]) -> str:
    """Return the store's checksum of an object's content, or "" if it has none."""
    return next(
        (info[key].strip('"') for key in ("md5Hash", "ETag", "etag") if info.get(key)),
        "",
    )


def list_objects(
    url: str, split: str, where: str, c4: bool
) -> list[tuple[str, int, str]]:
    """List (URL, size, checksum) of a split's files in a folder, a glob, or one file,
    as ``list_local`` does.
    """
    scheme = url.split("://")[0]
    on_hub = re.fullmatch(
        r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(refs/\w+/\w+|[^/]+))?(/.*)?", url
    )
    if on_hub is None and scheme not in ("s3", "gs"):
        raise ConfigError(
            f"{where}, expected s3://BUCKET/FOLDER, gs://…, "
            "hf://datasets/OWNER/NAME[@REVISION]/… or a local path"
        )
    if on_hub is not None:
        url = "hf://datasets/{}@{}{}".format(
            *commit_of(HubName(on_hub[1], on_hub[2]), where), on_hub[3] or ""
        )
    method = "glob" if is_pattern(url) else "find"

    def find() -> dict[str, dict[str, Any]]:
        found = ask(url, method, FIND_SECONDS, detail=True)
        # Of a file itself, huggingface_hub 1 finds the name only.
        found = {
            f"{scheme}://{name}": info or ask(url, "info")
            for name, info in found.items()
        }
        files = {
            url: info
            for url, info in found.items()
            if info["type"] == "file" and not _hidden(url)
        }
        if on_hub is None and (
            some := next((url for url in files if files[url]["size"]), None)
        ):
            # an account may be allowed only to list
            ask(some, "cat_file", start=0, end=1)
        return files

    # by a part that the path does not name; a folder may be an object, too
    def _hidden(one: str) -> bool:
        return (
            one.endswith("/")
            or "/." in one[len(os.path.commonprefix((one, url.rstrip("/")))) - 1 :]
        )

    try:
        files = retried(find, LISTING_SECONDS, "data: the list of files", may_recover)
    except ConfigError:
        raise
    except Exception as error:  # every store's library raises its own
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ConfigError(
            f"{where}, which cannot be read ({reason}); expected access by "
            f"{ACCESS[scheme]}"
        ) from error
    whole = method == "find" and [*files] != [url]
    paths = (
        select([*files], url, split, where, c4)
        if whole
        else readable_formats([*files], where)
    )
    if not paths:
        raise ConfigError(
            f"{where}, which matches no file; expected names such as {NAMES}"
        )
    check_kinds(paths, where)
    for index in (
        path.removesuffix(".bin") + ".idx" for path in paths if path.endswith(".bin")
    ):
        if ask(index, "exists"):
            raise ConfigError(
                f"{where}, which has {index!r} of Megatron-LM; such data is only read "
                "from local files: copy it"
            )
    return [(path, files[path]["size"], etag_of(files[path])) for path in paths]
