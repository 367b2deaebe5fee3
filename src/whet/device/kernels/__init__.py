"""Triton kernels for CUDA in half precision.

A kernel is added only if it is measurably faster. Figures are from an H200 (docs/lab.md):

| kernel | used by | gain |
| --- | --- | --- |
| rotary attention (`attention.rotary_attention`) | puzzle | 0.195 to 0.141 ms a layer, backward 0.685 to 0.345 ms |
| span attention (`attention.span_attention`) | text, chat | 415 to 168 us (text), 1,110 to 414 us (chat) a layer |
| SwiGLU (`rowwise.swiglu`) | puzzle, chat | backward 0.50 to 0.27 ms a layer; with attention 100.1 to 92.7 ms a step |
| RMSNorm over a sum (`rowwise.rms_norm_sum`) | chat | chat step 92 to 67.3 ms, 13.1 to 11.0 GB |
| residual LayerNorm (`rowwise.residual_layer_norm`) | text | 137 to 97 us a layer; text step 23.6 to 19.7 ms |
| GroupNorm and activation (`group_norm.group_norm_activation`) | Hex | 594 to 140 us a layer |

Each call site has a reference implementation with torch operators. It is used on other devices, in float32, and if
Triton is not installed.
"""
