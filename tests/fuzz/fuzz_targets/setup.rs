#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| towline_fuzz::setup::run(data));
