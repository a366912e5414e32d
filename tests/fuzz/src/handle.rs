//! The 64 bytes that NCCL carries to the connecting side, from anywhere.

use towline::plugin::handle::ConnectionHandle;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut bytes = [0; 64];
    let taken = data.len().min(64);
    bytes[..taken].copy_from_slice(&data[..taken]);
    if let Ok(handle) = ConnectionHandle::decode(&bytes) {
        let again = ConnectionHandle::decode(&handle.encode()).expect("what we wrote can be read");
        assert_eq!(again.secret, handle.secret);
        assert_eq!(again.addresses, handle.addresses);
        assert_eq!(again.key, handle.key);
        let mut keyed = handle.encode();
        ConnectionHandle::set_key(&mut keyed, 77);
        assert_eq!(ConnectionHandle::decode(&keyed).expect("still a handle").key, 77);
    }
}
