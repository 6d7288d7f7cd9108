"""What runs before and around a training: dry run, doctor, launch files, the command line."""

from parallel3d._util.lazy import export_lazily

export_lazily(__name__, {})
