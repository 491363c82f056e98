"""Training jobs whose speed others have published, as ordinary scripts; `published.csv` names each
figure's source."""
