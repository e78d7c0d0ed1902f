"""This package is the data pipeline: files → documents → slots → sequences.

The modules use these terms:

slot      one of the run's S document streams (``stream.slots``). Every global batch takes the same number of sequences
          from each slot. A rank reads a contiguous range of slots.
epoch     of a slot: one time through its share of the documents.
source    a data set with a weight ([[stream.sources]]). A run has one source unless the config lists several.
pass      one sequential read of a file.
position  of a slot: the integers (``place.Field``) from which a resumed run continues.

sources        the data sets that the config names
  ▼ files        their files, listed once on rank 0: local, on disk; hub (C4) and hub_dataset (any other data set), on
  │              the Hugging Face hub; mirror: a local copy of a data set of the hub
  │ assignment   which slot reads which documents of these files; mixture: the same for several sources
  ▼
documents      the documents of one file, by the reader of its format (formats: json_lines, parquet, text_files,
  │              pretokenized); disk and remote read its bytes (retrying_file: what they share); content_check looks at
  │              a few files before training
  ▼ passes       one pass over a file serves all slots of a rank; place: the position of each slot
cursor         the documents of a slot, one after another; shuffle: the same documents, shuffled in windows
  │ limits       how much bad data stops a run
  ▼ tokenizer, fast_tokenizer
stream         the slots of a rank: tokenizes documents ahead and packs them into sequences
  ▼ worker       the process that runs all of this ahead of training
loader         TorchTitan's dataloader; its state is the positions and the fingerprint; progress: how far the epochs are
"""
