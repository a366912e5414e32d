//! How a version's table is put together and exported.

use std::ffi::CStr;

/// What `NCCL_NET` selects and the log shows.
pub(super) const NAME: &CStr = c"Towline";

/// A table of functions that C finds by its symbol.
#[repr(transparent)]
#[derive(Debug)]
pub struct Table<T>(pub T);

// SAFETY: a table is never written after the compiler made it; it holds function pointers and a pointer to a string
// constant, both valid in every thread for as long as the library is mapped.
unsafe impl<T> Sync for Table<T> {}

/// Exports `ncclNetPlugin_vN`. The fields that no version has changed since v4 are filled in here; the others are
/// given as `field: the file of the version that introduced the function`.
macro_rules! export_table {
    ($(#[$doc:meta])* $symbol:ident: $type:ident = { $api:literal; $($field:ident: $function:expr),* $(,)? }) => {
        $(#[$doc])*
        // SAFETY: the symbol is NCCL's name for exactly this type, and nothing else in the process defines it in this
        // library's scope.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        pub static $symbol: $crate::abi::table::Table<$crate::nccl::ffi::$type> =
            $crate::abi::table::Table($crate::nccl::ffi::$type {
                name: $crate::abi::table::NAME.as_ptr(),
                devices: Some($crate::abi::v4::devices::<$api>),
                deregMr: Some($crate::abi::v4::dereg_mr::<$api>),
                test: Some($crate::abi::v4::test::<$api>),
                closeSend: Some($crate::abi::v4::close_send::<$api>),
                closeRecv: Some($crate::abi::v4::close_recv::<$api>),
                closeListen: Some($crate::abi::v4::close_listen::<$api>),
                $($field: $function),*
            });
    };
}
pub(super) use export_table;
