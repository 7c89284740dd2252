"""Rules for single texts in a job file: names, patterns, globs, addresses.

Each check takes the text and raises BadValueError with the remedy. Must not depend on the text's place in the file.
"""

from __future__ import annotations

import re

from orchestrator.spec.problems import BadValueError, quoted, shown

NAME_PATTERN = r"[a-z](?:[-a-z0-9]{0,48}[a-z0-9])?"
NAME_REMEDY = "begin with a letter; then lower-case letters, digits and inner hyphens, at most 50 characters"
ENV_PATTERN = r"[A-Za-z_][A-Za-z0-9_]{0,254}"
ENV_REMEDY = "letters, digits and underscores, not beginning with a digit"
LABEL_PATTERN = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]{0,61}[A-Za-z0-9])?"
USER_PATTERN = r"[A-Za-z0-9_][-A-Za-z0-9_.@\\]{0,63}\$?"
"""A user in USER/NAME: an account's name, also of a directory service, or a number."""
_SET_BY_ORCH = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_[A-Z_]+|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_[A-Z_]+|ORCH_[A-Z_]+|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|ROCR_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
)
MOST_WIDE_SETS = 8
_ESCAPED = re.compile(r"\\[uUN]")
_SECRET = re.compile(r"(?i)(?:.*_)?(?:key|token)s?|.*(?:passw|secret|credential).*")


def looks_secret(name: str) -> bool:
    """Whether the name of a variable is one that keys, tokens and passwords have."""
    return _SECRET.fullmatch(name) is not None


def regular_expression(text: str) -> None:
    """Refuse a text that Python's `re` cannot compile, or only with much work: the daemon compiles it for every user.

    A set of characters with one beyond U+00FF is compiled to a table of all 65,536, which takes some milliseconds.
    """
    if (not text.isascii() or _ESCAPED.search(text)) and (sets := text.count("[")) > MOST_WIDE_SETS:
        raise BadValueError(
            f"{sets} sets of characters in a regular expression with characters beyond ASCII",
            f"write at most {MOST_WIDE_SETS} sets in [ ]",
        )
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError, Warning) as error:  # Warning: if warnings are errors
        raise BadValueError(
            f"not a regular expression: {shown(str(error))}", "the syntax is that of Python's re module"
        ) from error


def progress_expression(text: str) -> None:
    """Refuse a regular expression without a group for the step."""
    regular_expression(text)
    if re.compile(text).groups < 1:
        raise BadValueError("the pattern has no group for the step", r"write 'step (\d+)' or 'step (\d+)/(\d+)'")


def set_by_orch(name: str) -> bool:
    """Whether orch sets the variable for every rank."""
    return _SET_BY_ORCH.fullmatch(name) is not None


def user_variable(name: str) -> None:
    """Refuse the variables that orch sets for every rank."""
    if set_by_orch(name):
        raise BadValueError(
            "orch sets this variable itself", "remove it; resources say how many ranks and GPUs there are"
        )


def inside(pattern: str) -> None:
    """Refuse a glob that leaves the job's directory."""
    if pattern.startswith(("/", "~")):
        raise BadValueError(f"{quoted(pattern)} is not relative", "write it relative to working_dir, such as out/**")
    if ".." in pattern.replace("\\", "/").split("/"):
        raise BadValueError(f"{quoted(pattern)} leads out of working_dir", "remove the `..`")


def watched(pattern: str) -> None:
    """Refuse a relative glob that leaves the job's directory; an absolute one may be a shared filesystem."""
    if not pattern.startswith("/"):
        inside(pattern)


def local_directory(path: str) -> None:
    """Refuse URLs."""
    if "://" in path:
        raise BadValueError(f"{quoted(path)} is not a local directory", "fetch it first; it is copied at submission")


def storage(path: str) -> None:
    """Refuse a relative path, because each job gets a new directory of its own."""
    if path.startswith("~"):
        raise BadValueError(f"{quoted(path)} is not expanded", "write the whole path, beginning with /")
    if "://" not in path and not path.startswith("/"):
        raise BadValueError(
            f"{quoted(path)} is relative", "write a path beginning with /, or a URL such as s3://bucket/x"
        )
    scheme, url, rest = path.partition("://")
    if not url:
        return
    if scheme != "s3":
        instead = (
            f"write {rest}"
            if scheme == "file" and rest.startswith("/")
            else "write s3://bucket/x, or a path beginning with /"
        )
        raise BadValueError(f"{quoted(path)} is not a storage that orch can use", instead)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(?:/[^/?#]+)*/?", rest) or ".." in rest.split("/"):
        raise BadValueError(f"{quoted(path)} names no bucket", "write s3://bucket, or s3://bucket/some/path")


def web_address(url: str) -> None:
    """Refuse a text that is not an http or https URL with a host."""
    if not re.fullmatch(r"https?://[^\s/?#]+(?:[/?#]\S*)?", url):
        raise BadValueError(f"{quoted(url)} is not a web address", "write https://host/path")
