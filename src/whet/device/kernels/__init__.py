"""Whet's own Triton kernels, for CUDA in half precision.

A kernel stays here only while a benchmark shows what it gains. Figures are from an H200 (docs/lab.md):

| kernel | used by | gain |
| --- | --- | --- |
| rotary attention (`attention.rotary_attention`) | puzzle | a layer 0.195 to 0.141 ms forward, 0.685 to 0.345 backward
|
| span attention (`attention.span_attention`) | text, chat | 415 to 168 us (text), 1,110 to 414 us (chat) a layer |
| SwiGLU (`rowwise.swiglu`) | puzzle, chat | a layer 0.50 to 0.27 ms backward; with attention a step 100.1 to 92.7 |
| RMSNorm over a sum (`rowwise.rms_norm_sum`) | chat | chat step 92 to 67.3 ms, 13.1 to 11.0 GB |
| residual LayerNorm (`rowwise.residual_layer_norm`) | text | 137 to 97 us a layer; text step 23.6 to 19.7 ms |
| GroupNorm and activation (`group_norm.group_norm_activation`) | Hex | 594 to 140 us a layer |

Each has a reference in torch's operators at its call site, which runs on other devices, in float32 and without triton.
"""
