"""The bridge between Hugging Face checkpoints, the Megatron learner and the SGLang engines.

families         for each model family, its table of names and how its config.json is read
architecture     what a config.json describes, in Megatron's terms; `config` and `rope` read the common fields
blocks           the rows that the tables of names are made of
table            how the tensors of a row merge, split and shard, and their names in checkpoints
placement        which rows this rank's model chunks hold
buckets          all parameters in buckets, planned once, then filled with Hugging Face tensors
hf               Hugging Face directory -> the learner's shards, and back
safetensors_dir  the files of such a directory
sync, check      the learner's shards -> the engines, and whether the engines hold the same bits
"""
