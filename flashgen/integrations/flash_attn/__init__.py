"""FlashAttention's Python interface, by flashgen: version 2's functions here, version 3's in `flash_attn_3_interface`.

    from flashgen.integrations.flash_attn import flash_attn_func

`install()` makes `import flash_attn` find these in a process where nobody has installed flash_attn, for models that import it. What belongs
in this package: names, argument orders and layouts of flash_attn and its submodules that others import; attention itself is that of
`flashgen.attention`, `attention_varlen` and `attention_with_kvcache`.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .installation import VERSION, install, uninstall

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
__version__ = VERSION
