"""Reading of shell scripts without running any program."""

from agent_loop.files.shell.interpreter import ScriptReading as ScriptReading
from agent_loop.files.shell.interpreter import read_script as read_script
