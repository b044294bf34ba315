"""The processes besides trainers: loaders, embedding workers, embedding servers, group servers, dense servers."""
