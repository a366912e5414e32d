//! What the doctor can find. `tests/cli/doctor.rs` has a case for each cause, which makes the host sick, tries the cure
//! and looks again.

use serde::Serialize;

/// A problem that can be corrected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) severity: Severity,
    pub(super) cause: Cause,
    pub(super) what: String,
    /// The command that corrects it; a sentence where there is none.
    // The JSON stays compatible.
    #[serde(rename = "mend")]
    pub(super) fix: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Severity {
    /// Towline will not work, or not as configured.
    Problem,
    /// Towline works, but could be faster or surprise the user.
    Advice,
}

/// What is wrong, one name for each cure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Cause {
    PluginMissing,
    PluginLinkDangles,
    PluginNotReadable,
    PluginArchitecture,
    PluginNoExec,
    PluginWantsNewerLibc,
    PluginWantsLibrary,
    PluginDoesNotLoad,
    PluginHasNoTable,
    PluginDoesNotStart,
    NetIsOther,
    NetCase,
    PluginsOff,
    ChoiceLeadsNowhere,
    ChoiceOpensOther,
    ChoiceNeedsNewerNccl,
    NotOnLoaderPath,
    OtherPluginFirst,
    OtherCopyFirst,
    ConfBlanks,
    ConfLoaderVariable,
    ValueBlanks,
    InterfaceListFails,
    InterfaceMissing,
    InterfaceDown,
    InterfaceNoCarrier,
    InterfaceNoAddress,
    InterfaceWrongFamily,
    RailMissing,
    RailDown,
    InterfaceStrays,
    NoInterface,
    LoopbackChosen,
    LoopbackOnly,
    SpeedUnknown,
    FewDescriptors,
    LittleLockedMemory,
    SmallTcpBuffer,
    CongestionControlMissing,
    SettingUnknown,
    SettingInvalid,
    KeyUnusable,
    RdmaLibraryMissing,
    RdmaDeviceFilesMissing,
    RdmaNotBuilt,
    RdmaChoice,
    RdmaPortDown,
}

impl Finding {
    pub(super) fn problem(cause: Cause, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Problem, cause, what: what.into(), fix: fix.into() }
    }

    pub(super) fn advice(cause: Cause, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Advice, cause, what: what.into(), fix: fix.into() }
    }
}
