"""The nodes for ComfyUI, where a clone of this repository lies in `custom_nodes`. Nothing else imports this file."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("visual_spec") is None:  # not installed: this clone will do
    sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "weights")]

from visual_spec.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
