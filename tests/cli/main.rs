//! The program `towline` as a user runs and installs it.

#[path = "../support/mod.rs"]
mod support;

mod commands;
mod doctor;
mod install;
