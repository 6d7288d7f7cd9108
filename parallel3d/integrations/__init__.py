"""Other libraries' programs on parallel3d: a file for each library, which is imported when it is used.

``docs/integrations.md`` has what a user of each changes, and how far the results are from the plain ones.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.integrations import accelerate as accelerate
    from parallel3d.integrations import lightning as lightning
    from parallel3d.integrations import torchtitan as torchtitan
    from parallel3d.integrations import transformers as transformers
    from parallel3d.integrations import trl as trl
else:
    export_lazily(__name__, {".": "accelerate lightning torchtitan transformers trl"})
