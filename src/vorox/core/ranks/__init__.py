"""The processes of a run: who they are, how they find each other, whether they live and agree."""
