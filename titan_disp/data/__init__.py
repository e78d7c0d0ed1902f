"""The data pipeline, from files to batches.

A run has S *slots* (``stream.slots``), which are streams of documents. Every global
batch takes the same number of sequences from each slot, so that the batches do not
depend on the number of ranks. A rank reads a contiguous range of slots. An *epoch* of a
slot is one time through its share of the documents. A *source* is a data set with a
weight ([[stream.sources]]). A *position* says where a slot continues (``position``).

Once, at the start::

    sources.list_and_check      the files of all data sets, on rank 0: listing and
      │                         stores list the files, findings looks at each file (or
      │                         index describes it), ledger says what becomes of it
      ▼
    assignment.Assignment       which slot reads which documents of these files
      │
      ▼
    loader.StreamLoader         the positions of a rank's slots, as checkpoints store
                                them; fingerprint: what must agree with a checkpoint

For every batch, in a rank's worker (``prefetch``). Each step calls the step above it::

    storage.RetryingFile.read   bytes of a file; failed reads are tried again
      ▼
    documents.Documents.read    the next document of the file, unparsed: formats for
      │                         text, token_ids for ids; blocks: where reading can begin
      ▼
    passes.Passes.fetch         the next document of a slot; one sequential read of a
      │                         file, a *pass*, serves all slots of the rank
      ▼
    cursor.Cursor.next          the next usable document, with the positions before and
      │                         after it
      ▼
    shuffle.Shuffle.next        the same documents, shuffled in windows
      ▼
    stream.Slot.fill            the next sequence of a slot: documents are tokenized
      │                         ahead (tokenizer) and packed
      ▼
    stream.Sequences            groups of microbatches, of all slots in turn
      ▼
    loader.StreamLoader         batches, in the training process; the loader moves its
                                positions past each batch

``options`` holds the options of all these steps. ``validation`` reads the first
sequences of the validation split with ``stream``. ``hf_tokenizer`` makes a model's
tokenizer for export. The commands that write data (fetch, indexing, sample) are in
``titan_disp.lab``.
"""
