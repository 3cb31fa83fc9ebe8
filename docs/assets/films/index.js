Object.assign(window.criaFilmSets ||= {},{
"home":{"title":"One training step of Llama-3.2-1B on a T4, switch by switch","films":{"plain":"plain fp32 training","lora":"LoRA","attention":"SDPA with expanded K/V heads","checkpointing":"gradient checkpointing","chunked_loss":"chunked loss","half":"fp16, lean preparation","all":"NF4, paged 8-bit AdamW, accumulation"},"top":36283497841,"adds":true},
"plain":{"title":"One step of plain fp32 training, moment by moment","films":{"plain":"plain fp32 training"},"top":36283497841,"adds":false},
"checkpointing":{"title":"A step with LoRA and SDPA, without and with gradient checkpointing","films":{"attention":"off","checkpointing":"gradient checkpointing"},"top":16778019471,"adds":false},
"attention":{"title":"A step with LoRA: eager attention, and SDPA","films":{"lora":"off","attention":"SDPA with expanded K/V heads"},"top":25446464881,"adds":false},
"chunked_loss":{"title":"A step with LoRA, SDPA and checkpointing, without and with the chunked loss","films":{"checkpointing":"off","chunked_loss":"chunked loss"},"top":9929071002,"adds":false},
"together":{"title":"The capstone's step, and what happens without each switch","films":{"all":"all switches","without_checkpointing":"without checkpointing","without_chunked_loss":"without chunked loss","without_nf4":"without NF4","without_fp16":"without fp16","without_sdpa":"without SDPA"},"top":5814668493,"adds":false},
"reserved":{"title":"What PyTorch's allocator reserves, without and with expandable segments","films":{"segments":"off","expandable":"expandable segments"},"top":16778019471,"adds":false},
"offload":{"title":"Rows of 16,384 tokens without and with activation offload","films":{"long":"off","long_offload":"activation offload"},"top":5684435354,"adds":false},
"in_backward":{"title":"Training all weights: steps after the backward pass, or in it","films":{"full_waiting":"off","full_in_backward":"optimizer in the backward pass"},"top":17317022925,"adds":false}
});
