"""Starting ranks: on this machine (``--nproc``), and on clusters (``vorox launch``)."""
