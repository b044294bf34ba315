"""The processes beside trainers: loaders, embedding workers, embedding servers, group servers, dense servers."""
