"""Parts of any daemon: supervisor, clock, files, sockets, commands, log."""

from flanneld.runtime.imports import defer

# Libraries import these at once and use them late or never, 9 ms of each start: logging (traceback), msgspec
# (textwrap), email (calendar, header, locale), commands (shlex, shutil, subprocess).
for _name in (
    "calendar",
    "email.header",
    "locale",
    "shlex",
    "shutil",
    "subprocess",
    "textwrap",
    "tokenize",
    "traceback",
):
    defer(_name)
