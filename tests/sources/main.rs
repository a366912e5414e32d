//! What is true of the sources and the pages: imports, messages, links, bindings, the corpus of the fuzz targets.

mod bindings;
mod docs;
mod fuzz_corpus;
mod rooms;
