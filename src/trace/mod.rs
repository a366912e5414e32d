pub mod event;
pub mod key;
pub mod names;
pub mod ring;
