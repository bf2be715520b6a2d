"""What `torch.vmap` is told of each operator."""

from __future__ import annotations

import torch

from .autograd import attention
from .batching import batched, refuse_mapped_gradients
from .gradients import attention_backward, attention_tensors_backward
from .registration import LIBRARY, attention_forward, attention_output

for _operator, _tensors, _options in ((attention_output, 3, 9), (attention_forward, 3, 9), (attention, 3, 10), (attention_backward, 7, 14)):
    torch.library.register_vmap(_operator, batched(_operator, _tensors, _options, in_list=True), lib=LIBRARY)
torch.library.register_vmap(attention_tensors_backward, refuse_mapped_gradients, lib=LIBRARY)
