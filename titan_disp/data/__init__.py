"""Files → documents → slots → sequences.

sources        which data sets
  ▼ files        which files of them, listed once on rank 0: local, on disk; hub (C4), hub_dataset (any); mirror: a copy of one
  │ assignment   which slot reads which documents of them: by seed and epoch, never by the ranks; mixture: of several sources
  ▼
documents      a file, document by document, by the reader of its format (formats: json_lines, parquet, text_files, pretokenized);
  │              its bytes: disk and remote (what they share is raw); first_look: those few that are looked at before training
  ▼ passes       one read of a file for all slots of a rank; place: where each of them is, a few integers
cursor         the documents of a slot, one after another; shuffle: in windows, each in an order of its own
  │ limits       how many of them may be bad
  ▼ tokenizer, fast_tokenizer
stream         the slots of a rank: documents tokenized ahead, packed into sequences
  ▼ worker       a process that does all this ahead of training
loader         TorchTitan's dataloader; its state is the positions and the fingerprint of the data; progress: for the metrics
"""
