"""`visual-spec`, where its entry point looks for it: see `visual_spec.commands`."""

from visual_spec.commands.main import build_parser as build_parser
from visual_spec.commands.main import main as main
