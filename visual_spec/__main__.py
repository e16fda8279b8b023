"""`python -m visual_spec` is `visual-spec`."""

from visual_spec.cli import main

raise SystemExit(main())
