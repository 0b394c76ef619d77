"""`python -m cute_attn COMMAND`."""

from cute_attn.cli import main

raise SystemExit(main())
